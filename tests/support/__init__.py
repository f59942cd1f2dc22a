"""What tests share: systems, peers, models and clients of theirs."""

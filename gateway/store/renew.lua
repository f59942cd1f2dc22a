return refusal(ARGV[5]) or own(epoch)

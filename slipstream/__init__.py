"""What the services share: the contract, the candidate tree, the noise, the links. Imports no service."""

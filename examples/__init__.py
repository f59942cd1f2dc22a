"""Small programs that show the system at work."""

"""What a gateway counts and traces of its requests. Observes sessions; nothing else imports it but the process
itself."""

"""A page that shows what speculation does, and what the gateway knows of its fleet. Imports what the HTTP routes do."""

"""Options of a server, of a request and of an operator."""

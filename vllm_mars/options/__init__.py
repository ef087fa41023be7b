"""The user's options: of a server, of a request, of an operator."""

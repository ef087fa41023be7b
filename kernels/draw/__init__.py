"""The draw behind a request's accepted drafts."""

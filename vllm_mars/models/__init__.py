"""Models and drafts on this machine."""

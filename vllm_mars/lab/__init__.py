"""The laboratory: measures servers from outside, into one file, and shows what the file holds."""

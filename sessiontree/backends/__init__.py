"""Where records are kept. Nothing here knows nodes."""

"""One module for each engine, which imports it, if at all, only when it is used."""

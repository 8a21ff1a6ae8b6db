"""The agent on a worker: Python >= 3.8 and its standard library alone, sent over each connection."""

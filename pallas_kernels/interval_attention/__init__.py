"""Attention where each row sees an interval of the keys: the core of training attention."""

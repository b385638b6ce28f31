"""Attention in which every query row sees an interval of the keys: the core of training attention."""

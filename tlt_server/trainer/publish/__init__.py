"""Drafters for others: judged, exported, and offered to servers."""

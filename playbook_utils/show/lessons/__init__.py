"""Figures that one lesson draws, a file a lesson: `show` has their names."""

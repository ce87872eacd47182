"""The form that lessons are brought into, and which of them are not there yet."""

OLD_FORM = {"01", "04", "18", "19"}
"""Numbers of the lessons that still have the old form; each leaves when it is rewritten."""

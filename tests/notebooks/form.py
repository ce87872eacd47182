"""The form that lessons are brought into, and which of them are not there yet."""

OLD_FORM = {"00", "01", "02", "03", "04", "05", "07", "18", "19"}
"""Numbers of the lessons that still have the old form; each leaves when it is rewritten."""

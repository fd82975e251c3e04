"""Time of recoveries from killed nodes."""

"""Decides whether executables that were built without their chip give the recorded results on this one."""

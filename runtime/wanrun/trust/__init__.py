"""Whether executables that were built without their chip do on this chip what the artifact recorded."""

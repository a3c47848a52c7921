"""The files of programs and executables, and how executables are loaded."""

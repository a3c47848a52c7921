"""The facts about this machine and this process: its CPU, devices, memory and JAX's process-wide state."""

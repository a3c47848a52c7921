"""Denoises noise to latents: solvers, noise, and the loop over steps."""

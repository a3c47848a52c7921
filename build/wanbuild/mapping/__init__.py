"""Maps source keys to parameters: one table per component, and the engine that checks it."""

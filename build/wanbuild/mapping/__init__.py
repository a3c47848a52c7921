"""Which source key fills which parameter: one table per component, and the engine that checks them."""

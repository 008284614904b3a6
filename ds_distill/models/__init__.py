"""Loading models, the bundle, what an encoder says."""

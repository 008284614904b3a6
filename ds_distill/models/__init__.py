"""Models: configuration, loading, the bundle, encoder outputs, packed inputs."""

"""From images to features: the encoder as a deployment, and images that travel to it together."""

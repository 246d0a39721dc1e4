"""Image classification: data, models, and many models in one stack."""

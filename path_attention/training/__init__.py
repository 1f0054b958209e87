"""Training: token corpora, packing, recipes, and one loop on torch's own engine."""

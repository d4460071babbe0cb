"""What a layer computes between its matrix products: one interface, in torch and in Triton."""

"""The operations of a layer between its matrix products: one interface, in torch and in Triton."""

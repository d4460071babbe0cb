"""How families of models name what they are made of: config and checkpoint in, layers out."""

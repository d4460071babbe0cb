"""The playground: a static page to try a model with, and to watch its engine."""

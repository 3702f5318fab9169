"""maxlite: a YAML-driven command-line training launcher for large language models in JAX."""

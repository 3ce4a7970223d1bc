"""Adapters for other libraries. Each one imports its library, so nothing here is imported by the package itself."""

"""What users write and the service compiles: pydantic models, importable without torch and Ray."""

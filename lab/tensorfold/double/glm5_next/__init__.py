"""What is particular to GLM-5.3-Flash."""

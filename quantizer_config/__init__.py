"""Configuration of WSVD: pure data, validated, JSON round trip."""

"""spec_verify_xpu as the verification of inference engines, one module each, which imports its engine when it is used."""

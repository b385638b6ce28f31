"""Training of P-EAGLE and EAGLE-3 drafters."""

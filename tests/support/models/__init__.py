"""Model files: small random ones of each family, broken ones, and what reads them."""

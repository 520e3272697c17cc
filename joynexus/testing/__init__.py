"""Fakes and contract checks, for joynexus itself and for plugins."""

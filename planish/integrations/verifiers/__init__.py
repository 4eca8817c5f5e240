"""Use environments of the verifiers library as environments of planish."""

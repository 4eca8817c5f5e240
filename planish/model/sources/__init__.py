"""Where base models come from: their names, downloads and conversions, and the files of their
weights.
"""

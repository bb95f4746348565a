"""Wan 2.1 and 2.2: text, image and first-last-frame to video, with every attention call behind a role."""

"""The processes of one run: how they find each other, agree, and end together."""

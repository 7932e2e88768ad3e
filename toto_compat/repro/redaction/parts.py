"""What the patterns of this folder are made of. Each reads on and never back, so that no text makes it slow."""

REDACTED = "<redacted>"

# With what is not seen: soft hyphens, joiners, spaces of no width.
IN_NAME = r"[\w.\u00ad\u200b-\u200d\u2060\ufeff-]"
NAME = rf"(?:(?!->){IN_NAME})++"  # a hyphen of an arrow is none of a name
SPACE = r"[^\S\r\n]*+"
QUOTED = r"(?:\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|`[^`\n]*+`)"
QUOTE = r"\\*+[\"']?"  # one that may be escaped, or none
BOUNDARY = r"(?=[\s,;)}\]&>]|$)"

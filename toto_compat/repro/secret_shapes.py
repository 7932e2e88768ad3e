"""The shapes that secrets have in text. Every pattern reads on and never back, so that no text makes it slow."""

import re

REDACTED = "<redacted>"

# With what is not seen: soft hyphens, joiners, spaces of no width.
_IN_NAME = r"[\w.\u00ad\u200b-\u200d\u2060\ufeff-]"
_NAME = rf"(?:(?!->){_IN_NAME})++"  # a hyphen of an arrow is none of a name
_SPACE = r"[^\S\r\n]*+"
_QUOTED = r"(?:\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|`[^`\n]*+`)"
_BOUNDARY = r"(?=[\s,;)}\]&>]|$)"
_QUOTE = r"\\*+[\"']?"

# --- where a value stands ---------------------------------------------------------------------------------------------

# A name and what stands between it and its value. `==` is a guard or a pin, unless what follows is quoted.
ASSIGNED = re.compile(
    rf"(?<!{_IN_NAME})(?P<name>{_NAME})"
    rf"(?P<gap>{_QUOTE}\]?{_SPACE}(?:=>|:=|[+?]?=(?!=)|==(?={_SPACE}[\"'])|:(?!:)|->|[\u2192\uff1d\uff1a\u2236\ufe55\ufe66]){_SPACE})"
)
# '--token x', "'--token', 'x'" and "('password', 'x')"
OPTION = re.compile(rf"(?P<name>(?<!\S)--(?P<key>{_NAME})[ \t]++)(?P<value>(?!<redacted>)(?>{_QUOTED}|\\\S|\S)++)")
ARGUMENT = re.compile(
    rf"(?P<name>(?<=[\"'])--(?P<key>{_NAME})[\"'][ \t]*+,\s*+)(?P<value>[bru]?{_QUOTED})(?=\s*+[,\])}}]|$)"
)
PAIR = re.compile(
    rf"(?P<name>\(\s*+[bru]?[\"'](?P<key>{_NAME})[\"']\s*+,\s*+)(?P<value>[bru]?{_QUOTED})(?=\s*+,?\s*+\))"
)
PARAMETER = re.compile(
    r"(?P<name>[?&][\w.-]{0,64}?(?:token|key|secret|sig|sas|pass|pwd|auth|code|credential|jwt)[\w.-]{0,64}=)"
    r"(?P<value>(?!<redacted>)[^&\s#'\"]+)",
    re.I,
)
HEADER = re.compile(
    r"(?P<name>(?<![\w.-])(?:(?:proxy-)?authorization|(?:set-)?cookie"
    rf"|x-(?=[\w-]*?(?:token|key|auth|secret|signature))[\w-]++){_QUOTE}"
    rf"(?:[ \t]*+[=:]|(?<=[\"'])[ \t]*+,(?=[ \t]*+b?[\"']))[ \t]*+)"
    rf"(?P<value>(?!b?\\*[\"'`]?<redacted>)(?:b?{_QUOTED}{_BOUNDARY}|[^\r\n]+))",
    re.I | re.M,
)
# curl -u name:password; two numbers are a user and a group
USER = re.compile(
    r"(?P<name>(?<![\w-])(?:-u|--user|--proxy-user)(?:[ \t=]++|[\"'][ \t]*+,[ \t]*+)[\"']?(?!\d++:\d++(?!\S))"
    r"[^\s:\"']++:)"
    r"(?P<value>(?!<redacted>)[^\s\"']+)"
)
# Programs whose -p, or the one word behind which, is a password: sshpass -p x, mysql -px, wandb login x
COMMAND = re.compile(
    r"(?P<name>(?<![\w./-])(?:sshpass|(?:mysql|mariadb)[\w-]{0,20}+|(?:docker|podman|nerdctl|skopeo|oc|az)[ \t]++login)"
    r"(?=[ \t])(?:(?![ \t]-p)[^\n;|&]){0,200}+[ \t]-p[ \t=]*+"
    r"|(?<![\w./-])wandb[ \t]++login[ \t]++(?:--?[\w-]++[ \t]++)*+(?=[\w-]{20}))"
    rf"(?P<value>(?!<redacted>|-)(?>{_QUOTED}|\\\S|\S)++)"
)
NETRC = re.compile(
    r"(?P<name>(?:^[ \t]*+|(?<=\s)login[ \t]++\S++[ \t]++)password[ \t]++)"
    r"(?P<value>(?!<redacted>)[^\s=:]\S*+)(?=[ \t]*+$)",
    re.I | re.M,
)
SCHEME = re.compile(r"(?P<name>\b(?:bearer|basic|digest|token)[ \t]++)(?P<value>[A-Za-z0-9._~+/=-]{12,})", re.I)
URL = re.compile(r"(?P<name>(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?!<redacted>)[^\s/?#]+@")
URL_WITH_SLASH = re.compile(
    r"(?<![\w+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://[^\s/?#@:\"']*+:(?P<value>[^\s@\"'/?#]*+[/?#][^\s\"']{0,300})@"
)

# --- what a value looks like ------------------------------------------------------------------------------------------

QUOTED_VALUE = re.compile(
    r"(?P<open>[bBrRuUfF]{0,2}+(?P<close>[\"'`]))(?!(?P=close))"
    rf"(?:(?<=\")(?:[^\"\\\n]|\\.)*+\"|(?<=')(?:[^'\\\n]|\\.)*+'|(?<=`)[^`\n]*+`){_BOUNDARY}",
    re.M,
)
# The same over several lines: what opens it is not closed in its own line.
LONG_QUOTED = re.compile(
    r"(?P<open>[bBrRuUfF]{0,2}+(?P<close>\"{3}|'{3}|[\"']))"
    rf"(?P<inside>(?:(?!(?P=close))(?:\\.|[^\\])){{1,10000}}+)(?P=close){_BOUNDARY}",
    re.M | re.S,
)
# A line that begins as those of loggers do, so that nothing that was opened before goes on in it.
RECORD = re.compile(r"^[ \t]*+[\[(]?(?:[VDIWEF]\d{4} \d\d:|\d{4}-\d\d-\d\d[T ]\d\d:|[A-Z][a-z]{2} [ \d]\d \d\d:)", re.M)
CONTINUED = re.compile(r"(?<=\\)\r?\n[ \t]*+")
ESCAPED = re.compile(r"(?P<open>(?P<close>\\{1,8}+[\"']))(?:(?!(?P=close))[^\n])++(?P=close)")
BRACKET = re.compile(r"\w{0,40}+[(\[{]")
WORD = re.compile(rf"(?>{_QUOTED}|\\\S|\S)++")
# Words up to the end of the line, a bar, or the next `name=`.
SPOKEN = re.compile(rf"(?>{_QUOTED}|\\\S|\S)++(?:[ \t]++(?!\||{_NAME}[\"']?[=:])\S++)*+")
# The value is in the lines below: nothing more in this one, or the mark of a block of YAML.
BLOCK_MARK = re.compile(r"(?:[|>][-+0-9]{0,3})?[ \t]*+\r?\n(?=[ \t])")
# It is redacted already, by this or with asterisks, or says that there is none.
STANDS = re.compile(
    rf"[bru]?\\*+[\"'`]?{REDACTED}"
    r"|(?:None|null|nil|true|false|\"\"|''|[\"']?\*++[\"']?)(?=[)}\]]*+(?:[,;]?\s|[,;]?$))",
    re.I | re.M,
)
# A name that only hints at a key: its value goes if it looks drawn at random.
HINT = re.compile(r"key|auth|cred|pass|salt|nonce|signature|(?:sig|api)$|[_.-]api[_.-]", re.I)

# --- what is known wherever it stands ---------------------------------------------------------------------------------

# The words of a wallet, twelve to twenty-four of three to eight letters, behind what they are called.
PHRASE = re.compile(
    r"(?P<name>(?<![a-z])(?i:mnemonic|(?:seed|recovery|backup|secret|wallet)[ _-]?(?:phrase|words?))(?![a-z])"
    r"[^\n]{0,40}?)"
    r"(?P<value>\b(?:[a-z]{3,8}[ ,]{1,3}){11,23}[a-z]{3,8}\b)"
)
COLOUR = re.compile(r"\x1b+(?:\[[0-9;?]*+[A-Za-z])?")
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.S)
SHAPES = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}"  # AWS
    r"|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|glpat-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|dckr_pat_[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]+"  # Slack
    r"|(?:bot)?\d{6,12}:AA[\w-]{20,}"  # Telegram
    r"|(?:discord|discordapp)\.com/api/(?:v\d+/)?webhooks/[\w/-]+"
    r"|sk-[\w-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}|dop_v1_[0-9a-f]{32,}|dapi[0-9a-f]{32}"
    r"|(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web token
    # of wallets: Ethereum, hierarchical ones, Bitcoin, Solana
    r"|0x[0-9a-fA-F]{64}(?!\w)|[xyzt]prv[1-9A-HJ-NP-Za-km-z]{90,}"
    r"|(?:[KL][1-9A-HJ-NP-Za-km-z]{51}|5[HJK][1-9A-HJ-NP-Za-km-z]{49})(?!\w)|[1-9A-HJ-NP-Za-km-z]{87,88}(?!\w)"
    r")"
)

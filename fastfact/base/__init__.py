"""What everything else stands on, and what knows nothing of weights or clients.

`kinds` says what a setting must be and `settings` has those of a federation; `files` writes whole files, `machine`
describes this computer and remembers what was measured on it, `plugins` loads methods of one's own, `formats` is what
the reference and the kernels agree on, `spread` how evenly clients do. Imports nothing else of the
package. Read `kinds.py` first.
"""

VERSION = "0.1.0"

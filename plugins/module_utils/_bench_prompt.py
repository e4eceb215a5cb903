# SPDX-License-Identifier: Apache-2.0
"""The benchmark's built-in prompt. Private to the collection: it may change at any time.

The text is data of the method: changing one character of it makes every older result incomparable.
It is the head of the Apache-2.0 licence as apache.org publishes it, with its leading blank line and indent.
"""

from __future__ import annotations

import hashlib

LICENSE_CHARACTERS = 2000
REQUEST = "\n\nContinue the text above."

# 2,000 characters; they end inside a word, as they should.
LICENSE_HEAD = """\

                                 Apache License
                           Version 2.0, January 2004
                        http://www.apache.org/licenses/

   TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION

   1. Definitions.

      "License" shall mean the terms and conditions for use, reproduction,
      and distribution as defined by Sections 1 through 9 of this document.

      "Licensor" shall mean the copyright owner or entity authorized by
      the copyright owner that is granting the License.

      "Legal Entity" shall mean the union of the acting entity and all
      other entities that control, are controlled by, or are under common
      control with that entity. For the purposes of this definition,
      "control" means (i) the power, direct or indirect, to cause the
      direction or management of such entity, whether by contract or
      otherwise, or (ii) ownership of fifty percent (50%) or more of the
      outstanding shares, or (iii) beneficial ownership of such entity.

      "You" (or "Your") shall mean an individual or Legal Entity
      exercising permissions granted by this License.

      "Source" form shall mean the preferred form for making modifications,
      including but not limited to software source code, documentation
      source, and configuration files.

      "Object" form shall mean any form resulting from mechanical
      transformation or translation of a Source form, including but
      not limited to compiled object code, generated documentation,
      and conversions to other media types.

      "Work" shall mean the work of authorship, whether in Source or
      Object form, made available under the License, as indicated by a
      copyright notice that is included in or attached to the work
      (an example is provided in the Appendix below).

      "Derivative Works" shall mean any work, whether in Source or Object
      form, that is based on (or derived from) the Work and for which the
      editor"""


def build_prompt(license_text: str = LICENSE_HEAD) -> str:
    """The first 2,000 characters of the licence, a blank line, and the request to go on."""
    return license_text[:LICENSE_CHARACTERS] + REQUEST


def prompt_hash(prompt: str) -> str:
    """What two results must share before their rates are compared."""
    return hashlib.sha256(prompt.encode("utf-8")).hexdigest()

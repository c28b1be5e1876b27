import sys
import tests.test_publication_stores as T
from tests.test_publication_stores import two
LIFE=T.LIFE
pairs=[p for p in LIFE if "evict" in p]
for w in ("group","commit"):
    for a,b in pairs:
        try: n=two(w,a,b,step=9)
        except BaseException as e: print("FAIL",w,a,b,str(e)[:3000]); continue
        print(w,a,b,n, flush=True)

import ast,sys
from pathlib import Path
root=Path(sys.argv[1]); 
mods={".".join(p.with_suffix("").parts).removesuffix(".__init__"):p for p in (q.relative_to(root) for q in (root/"echelon").rglob("*.py"))}
def graph(toponly):
    g={}
    for m,p in mods.items():
        tree=ast.parse((root/p).read_text()); s=set()
        def tc(node):
            return isinstance(node,ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        def walk(n,infn):
            for c in ast.iter_child_nodes(n):
                if tc(c): continue
                if isinstance(c,ast.ImportFrom) and c.module and c.module.startswith("echelon") and not (infn and toponly):
                    for a in c.names:
                        f=f"{c.module}.{a.name}"; s.add(f if f in mods else c.module)
                walk(c,infn or isinstance(c,(ast.FunctionDef,ast.AsyncFunctionDef)))
        walk(tree,False); g[m]={x for x in s if x in mods and x!=m}
    return g
def sccs(g):
    idx={};low={};st=[];on=set();out=[];i=[0]
    sys.setrecursionlimit(10000)
    def v(n):
        idx[n]=low[n]=i[0];i[0]+=1;st.append(n);on.add(n)
        for w in g[n]:
            if w not in idx: v(w);low[n]=min(low[n],low[w])
            elif w in on: low[n]=min(low[n],idx[w])
        if low[n]==idx[n]:
            c=[]
            while True:
                w=st.pop();on.discard(w);c.append(w)
                if w==n: break
            if len(c)>1: out.append(c)
    for n in g:
        if n not in idx: v(n)
    return out
for t in (True,False):
    print("top-level" if t else "all incl. function-local")
    for c in sccs(graph(t)): print("  ",len(c),sorted(c))

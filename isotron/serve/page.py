"""The chat page at /: one file, nothing loaded from elsewhere. PURE."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>isotron</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:0 auto;padding:1rem;display:flex;flex-direction:column;
height:100vh;box-sizing:border-box}
#log{flex:1;overflow:auto}.m{white-space:pre-wrap;margin:.5rem 0;padding:.5rem .8rem;border-radius:.6rem}
.user{background:#dde8f7;margin-left:3rem}.assistant{background:#eee;margin-right:3rem}.error{background:#fdd}
form{display:flex;gap:.5rem}textarea{flex:1;font:inherit}button,input{font:inherit}
</style>
<h1 id="name"></h1><div id="log" aria-live="polite"></div>
<p><label>temperature <input id="t" type="number" value="0.8" min="0" step="0.1"></label>
<label>tokens <input id="n" type="number" value="128" min="1"></label>
<label>key <input id="k" type="password" autocomplete="off"></label></p>
<form id="f"><textarea id="q" rows="2" aria-label="message" required></textarea>
<button id="send">Send</button><button id="stop" type="button" disabled>Stop</button></form>
<script>
const model=MODEL,$=i=>document.getElementById(i),messages=[];let control=null;$("name").textContent=model;
function show(role,text){const d=document.createElement("div");d.className="m "+role;d.textContent=text;
$("log").append(d);d.scrollIntoView();return d}
async function ask(){const box=show("assistant","");let text="";control=new AbortController();
$("send").disabled=true;$("stop").disabled=false;
try{const headers={"Content-Type":"application/json"};if($("k").value)headers.Authorization="Bearer "+$("k").value;
const r=await fetch("/v1/chat/completions",{method:"POST",signal:control.signal,headers,body:JSON.stringify({model,
messages,stream:true,temperature:+$("t").value,max_tokens:+$("n").value})});
if(!r.ok)throw new Error((await r.json()).error.message);
const reader=r.body.pipeThrough(new TextDecoderStream()).getReader();let rest="";
for(;;){const{done,value}=await reader.read();if(done)break;rest+=value;const lines=rest.split("\\n");rest=lines.pop();
for(const line of lines){if(!line.startsWith("data: ")||line==="data: [DONE]")continue;
const e=JSON.parse(line.slice(6));if(e.error)throw new Error(e.error.message);
text+=e.choices[0]?.delta?.content??"";box.textContent=text;}}
}catch(e){if(e.name!=="AbortError")show("error",e.message)}
messages.push({role:"assistant",content:text});box.dataset.done="1";$("send").disabled=false;$("stop").disabled=true}
$("f").onsubmit=e=>{e.preventDefault();const q=$("q").value;$("q").value="";messages.push({role:"user",content:q});
show("user",q);ask()};
$("stop").onclick=()=>control?.abort();
$("q").onkeydown=e=>{if(e.key==="Enter"&&!e.shiftKey&&!$("send").disabled){e.preventDefault();$("f").requestSubmit()}};
</script></html>
"""
